"""Tests, a module per idea. What several modules share is in modules without ``test_``:

- Real runs: ``fleet_run`` (a local fleet), ``reference`` (one process that it must equal), ``whole_model``,
  ``namespaces`` (machines), ``daemons`` (real networks), ``hanging_worker``, ``rogue_worker``.
- Parts in memory: ``virtual`` (time that jumps), ``polling``, ``runners`` (a step's parts), ``small_stages`` (compute),
  ``checkpoint_stages``, ``gates`` (admission), ``newcomers`` (before step 0), ``targets`` (a peer that is attacked).
- Inputs: ``corpora``, ``decoders``, ``traced_models``, ``own_models``, ``toml_files``, ``tiny_fleets`` (to simulate),
  ``planned_fleets``, ``placements``, ``linked`` (virtual links), ``small_disks``.
- What breaks promises: ``mutations`` (of frames), ``planted`` (bugs).
"""
