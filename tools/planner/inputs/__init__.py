"""Inputs that users give: cluster, model, network, prices, profiles, names."""
