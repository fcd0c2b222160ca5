"""Makes chains of blocks by tracing: any causal language model of ``transformers``, or a user's module.

``architecture`` builds a module of ``transformers`` from a configuration, ``factory`` a user's module, without weights;
the former also runs the whole model, to evaluate and to write text. ``export`` traces the module to one flat graph of
operators, ``cutting`` cuts that graph at the beginning of each block, and ``operators`` replaces random operators.
``costs`` counts parameters, FLOPs and memory, and ``outline`` keeps the results in the user's cache. ``making``
combines all steps, for the whole model or for a shorter model for planning. ``chain`` is the model for planning and
runs, and ``stage`` a run of blocks with weights. ``folder`` reads Hugging Face folders, and ``source`` writes the parts
as Python for readers.

Nothing here executes code that came over the network: a joiner gets sizes and names of an architecture, or the name of
a factory, which the joiner's user must have named, too. The joiner builds the chain with the installed software, and
compares digests.
"""
