"""The hostile corpus: every damaged file or request once, as a row of a table, and the readers that meet it.

A row is a name, what is made, the code of the error that must come, and values that it must name. The one
property is in ``refusal``: refused with this code and these values in one line, in time, and nothing is
written or changed. The campaign of random faults makes the same things at random.
"""
