"""A local page that shows runs: a fold over their events, served to browsers.

``page`` folds the events of one run into the state that is shown; ``curve`` thins the steps, ``frames`` keeps the past,
``health`` names the condition. ``sources`` brings events from a run folder or a session. ``publisher`` sends changes to
viewers, ``gatekeeper`` says which requests are served, ``site`` has the addresses, ``server`` is the HTTP server, and
``steering`` stops a run or removes a peer for the owner. ``static`` holds the page itself, without a build step.
"""
