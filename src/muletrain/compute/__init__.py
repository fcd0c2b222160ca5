"""This package computes one stage of the model. ``base.Compute`` is the seam: the runtime knows nothing else of a device.

``torch_compute`` implements it for a stage resident on one device: ``arithmetic`` computes, ``weights`` and ``scaling``
are its state, ``stash`` keeps graphs between forward and backward, ``threads`` runs jobs, ``slot`` orders calls, and
``results`` brings tensors to host memory. ``swap`` implements it for a stage that is larger than its device. ``paced``
gives a real stage a declared speed.
``jobs`` shows operations that take too long, ``checks`` refuses tensors that no correct peer sends, ``estimate`` says
what memory a stage needs, and ``probe`` and ``block`` measure this machine.

Other packages use ``Compute`` only. A subclass or a test may use ``TorchCompute.arithmetic`` and ``threads``.
"""
