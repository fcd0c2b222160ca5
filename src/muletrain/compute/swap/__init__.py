"""This package computes a stage that is larger than the device (ATOM, Wu et al. 2024, sec. III-C).

``backing`` is memory beside the device: weights, moments and gradients live there. ``state`` keeps the weights and
moments in backing memory, so that an update is either whole or did not happen. ``chain`` cuts the stage into
sub-models, ``loading`` brings one at a time to the device while another computes, and takes gradients away. ``fit``
says which sub-models fit into how much memory. ``arithmetic`` computes rounds of microbatches, and ``swapped``, the
``Compute``, forms rounds from the waiting calls.
"""
