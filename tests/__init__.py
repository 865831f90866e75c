"""Tests; a package, because a Megatron-LM checkout on the path has one of this name, which would come first."""
