"""This package holds the optimizers and the numbers derived from gradients.

``rules`` are AdamW and LAMB on the buffers that ``flat`` lays out; ``schedule`` is the learning rate. ``norms`` sums
squares in an order that does not depend on threads. ``sketch`` shortens a gradient to a few numbers, so that replicas
can compare gradients that none has whole.

Everything is pure: an update depends only on the arguments and the moments.
"""
