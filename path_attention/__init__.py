"""PaTH attention for PyTorch. Importing this package needs torch alone."""

from path_attention.ops.packing import Packing
from path_attention.ops.path import explain_choice, path_attention

__all__ = ["Packing", "explain_choice", "path_attention"]
__version__ = "0.1.0"
