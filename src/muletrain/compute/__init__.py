"""This package computes one stage of the model. ``base.Compute`` is the seam: the runtime knows devices only through
this class.

``torch_compute`` implements ``Compute`` for a stage resident on one device: ``arithmetic`` computes and holds the
state (with ``scaling``) and the graphs between forward and backward, ``threads`` runs jobs, ``slot`` orders calls,
and ``results`` brings tensors to host memory. ``swap`` implements ``Compute`` for a stage larger than the device.
``paced`` gives a real stage a declared speed. ``jobs`` shows operations that take too long, ``checks`` refuses
tensors that no correct peer sends, ``estimate`` gives the memory that a stage needs, and ``probe`` and ``block``
measure this machine.

Other packages use ``Compute`` only. A subclass or a test may use ``TorchCompute.arithmetic`` and ``threads``.
"""
