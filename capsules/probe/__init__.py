"""What a data loader yields, before any training: batches taken from the user's own loader and put into a capsule.

It runs the user's code, on purpose, so it lives in a process of its own: ``python -m llmconsole.capsules.probe.child``
with a request as JSON, which answers with JSON on its standard output and keeps what the loader prints to itself.
"""
