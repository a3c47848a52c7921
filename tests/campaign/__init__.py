"""A campaign of faults: random damage, hostile input and bad moments, with a verdict on each.

``python -m campaign --seconds 600 --log faults.jsonl`` runs it, from the folder ``tests``.
"""
