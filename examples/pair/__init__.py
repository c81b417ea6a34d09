"""What `train_pair.py` is made of: the corpus, the tokens, the training, the judgement."""
