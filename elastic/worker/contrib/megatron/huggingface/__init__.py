"""Models of the package transformers on megatron-core's layers: config, weights in and out.

- `config`: from a config.json to the arguments of `from_megatron`;
- `names`: the names of parameters here and there;
- `weights`: initial values from safetensors files;
- `export`: a checkpoint under the names of transformers.
"""
