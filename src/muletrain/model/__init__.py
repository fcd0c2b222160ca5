"""This package defines the model: its sizes, its stages, and its Hugging Face form.

``spec`` holds the sizes and what follows from them (parameters, FLOPs, cuts), without torch; ``presets`` names some.
``stage`` is a run of layers of the ``decoder``, under the names that the whole model has, and draws first weights from
the seed. ``dropout`` derives masks from (seed, step, microbatch). ``hf`` reads and writes Hugging Face folders, and
``generate`` evaluates a trained model and writes text with it.

A stage has no storage of its own: ``Stage.bind`` gives it weights, which their owner may change in place.
"""
