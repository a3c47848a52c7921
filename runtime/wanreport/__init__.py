"""Reports: one page of HTML about a run, a verification or a benchmark, which needs no other file.

``wanrun --report``, ``wanbuild verify --report`` and ``benchmarks/quality.py --report`` write one. Of the
runtime it uses what ``wanrun`` and ``wanrun.errors`` export, and of the server its stylesheet, so that the
pages look alike.
"""
