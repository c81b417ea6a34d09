"""`specjax chat`: a conversation. Its turns read only tokens that the caches do not hold.

    message -> chat template -> tokens -> those after the kept beginning -> chunks -> steps -> text

Open `conversation` first. `prefix_cache` keeps the caches between turns and says how far back they
go. `run_chat` reads messages and commands, and prints answers.
"""
