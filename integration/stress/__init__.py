"""Long runs of what must not be lost: threads, killed compiles, cache folders that fail.

    python -m integration.stress threads --threads 8 --minutes 10
    python -m integration.stress kills --times 1000
    python -m integration.stress faults

Each returns the list of what went wrong; the exit status says whether it is empty. The tests run a
short one of each (`integration/test_integration_stress.py`).

| module | what it holds |
|---|---|
| `programs.py` | the programs that are compiled, each with its arguments |
| `threads.py` | threads that call shared and own compiled functions, forward and backward |
| `kills.py` | processes that are killed while they compile into one cache folder |
| `faults.py` | cache folders that are read-only, full, another user's, damaged, swapped |
"""
