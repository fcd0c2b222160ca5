"""This package defines the model: its sizes, its stages, and its Hugging Face form.

``chain.Model`` is a chain of blocks, the view that everything else has of a model, without torch. ``spec`` is the native
decoder's chain; ``presets`` names some sizes. ``traced`` makes chains of other architectures. ``make`` makes chains,
their stages (``module.StageModule``) and whole models.
``stage`` is a run of the decoder's layers, under the names that the whole model has, and draws first weights from
the seed. ``dropout`` derives masks from (seed, step, microbatch). ``hf`` reads and writes Hugging Face folders, and
``generate`` evaluates a trained model and writes text with it.

A stage has no storage of its own: ``Stage.bind`` gives it weights, which their owner may change in place.
"""
