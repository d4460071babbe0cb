"""Mixture of experts: which experts a token goes to, and kernels that compute them."""
