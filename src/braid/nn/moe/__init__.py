"""Mixture of experts, the layer `E`: router, dispatch, experts."""
