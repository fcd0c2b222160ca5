"""Large things, block by block against a hash manifest: states (``blocks``) and the run's tokens (``tokens``). What
arrived is kept between attempts, and several donors give at once.
"""
