"""The TorchTitan 0.2.2 plugin. Importing it (``experimental.custom_import``) registers the
models ``llama3_owner`` and ``qwen3_owner`` and the dataset ``local``; nothing is patched.
"""

from torchtitan_matrixfsdp.titan.datasets import register_datasets
from torchtitan_matrixfsdp.titan.train_specs import register_train_specs

register_datasets()
register_train_specs()
