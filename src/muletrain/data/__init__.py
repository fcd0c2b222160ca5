"""This package turns a corpus into microbatches. Each module uses the ones above it only:

corpus      files, datasets and built-in text -> unique paragraphs
tokenizer   train or load a tokenizer
tokens      paragraphs -> memory-mapped tokens of two sides, train and held-out
microbatch  tokens -> microbatch (step, index), a pure function of the seed
ngram       what counting alone achieves
"""
