"""What the library computes, as hashes: a change of names and files keeps them.

`digest` hashes a traced function, `cases` are functions to trace, `golden` runs some of them, and
`frozen.json` holds what they gave. `tests/repo/test_frozen.py` compares. `goldens` holds
what public calls give, while their signatures move, too.
"""
