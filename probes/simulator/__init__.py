"""A GPU that is not here: traces of fake tensors, replayed through a model of CUDA's caching allocator."""
