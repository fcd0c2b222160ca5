"""This package turns a corpus into microbatches. Each module uses only modules above:

lines       bytes of a file -> lines of text
files       one file -> documents
corpus      files, datasets and built-in text -> documents
split       which documents are held out
encoder     text <-> tokens, one rule for documents and prompts
tokenizer   train, load or convert a tokenizer
tokens      documents -> memory-mapped tokens of two sides, train and held-out
microbatch  tokens -> microbatch (step, index), a pure function of the seed
ngram       what counting alone achieves
"""
