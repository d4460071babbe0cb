"""Mixture of experts: routing of tokens to experts, and kernels that compute the experts."""
