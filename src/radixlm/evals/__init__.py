"""`radixlm eval`: how right a model's answers are, on a server or in this process.

`items.py` has the records, `tasks.py` the names of the tasks, `cli.py` the flags. Read `run.py`
first. Item files are local, in the formats in which their authors publish them.
"""
