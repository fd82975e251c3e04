"""The layers that a worker holds, with their gradient sums and ledgers.

Start with `replica.py`. `LayerReplica.collect` is the place where a micro-batch's gradient enters
the sum and its index enters the ledger. `gradient_sum.py` has one sum with its ledger, `build.py`
makes replicas. `checkpoint.py` reads a layer from a durable checkpoint, and `export.py` turns
states into hashes and safetensors files. Nothing here decides when a copy is made or an update
happens, and nothing talks to other workers.
"""
