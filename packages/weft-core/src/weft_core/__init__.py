"""The ground under every weft package: errors, events, settings, cache folder, fakes, tracing.

Nothing is imported here, so that importing one module costs only that module;
`fake` and `tracing` need parts of torch that the others do not.
"""
