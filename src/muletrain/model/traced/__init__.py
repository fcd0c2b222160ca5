"""This package makes chains of blocks by tracing: any causal language model of ``transformers``.

``architecture`` builds the module from its configuration, without weights. ``export`` traces it to one flat graph of
operators, ``cutting`` cuts that graph where a block begins, and ``operators`` replaces what draws random numbers.
``costs`` counts parameters, FLOPs and memory. ``chain`` is the model as planning and runs see it, and ``stage`` a run of
its blocks with weights. ``folder`` reads Hugging Face folders, and ``source`` writes the parts as Python for readers.

Nothing here executes code that came over the network: a joiner gets sizes and names of an architecture, builds the chain
with its own ``transformers``, and compares digests.
"""
