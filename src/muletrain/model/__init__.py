"""Defines the model: sizes, stages, and the Hugging Face form.

``chain.Model`` is a chain of blocks, the torch-free view of a model for all packages. ``spec`` is the native decoder's
chain; ``presets`` names some sizes. ``traced`` makes chains of further architectures. ``make`` makes chains, stages
(``module.StageModule``) and whole models. ``stage`` is a run of the decoder's layers, with the parameter names of the
whole model, and draws first weights from the seed. ``dropout`` derives masks from (seed, step, microbatch). ``hf``
reads and writes Hugging Face folders, and ``generate`` evaluates a trained model and writes text.

A stage has no storage: ``Stage.bind`` sets the weights, which the owner may change in place.
"""
