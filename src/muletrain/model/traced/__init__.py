"""This package makes chains of blocks by tracing: any causal language model of ``transformers``, or a user's module.

``architecture`` builds a module of ``transformers`` from its configuration, ``factory`` a user's own, without weights; the
former also runs whole, to evaluate a model and to write text.
``export`` traces it to one flat graph of operators, ``cutting`` cuts that graph where a block begins, and ``operators``
replaces what draws random numbers. ``costs`` counts parameters, FLOPs and memory, and ``outline`` keeps them in the
user's cache. ``making`` does all of this, for the whole model or for a shorter one that planning needs. ``chain`` is the
model as planning and runs see it, and ``stage`` a run of its blocks with weights.
``folder`` reads Hugging Face folders, and ``source`` writes the parts as Python for readers.

Nothing here executes code that came over the network: a joiner gets sizes and names of an architecture, or the name of a
factory that its own user must have named too. It builds the chain with its own software, and compares digests.
"""
