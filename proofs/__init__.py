"""Virtual worlds of the production code: drawn faults and liars (``draws``, ``lying``), what may not happen (``witness``,
``verdict``), the run of a single process (``reference``), and the search for faults that break a promise (``fuzzing``)."""
