"""The model and its numerics: layers, gradients, optimizer, random numbers, state as bytes.

`layers.py` has the interface that a user implements, `LayerStack`; start reading there.
`gradients.py` sums micro-batch gradients, exactly or fast; `optimizer.py` updates one layer.
`rng.py` makes random numbers depend on the step and the micro-batch, never on the node.
`state_codec.py` writes a layer's state as bytes and changes its tensor-parallel size.
Nothing here knows about epochs, ledgers, copies or other workers.
"""
