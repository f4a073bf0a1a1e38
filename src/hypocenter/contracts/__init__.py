"""What each op demands of its arguments, as data that kernels, replay and doctor share.

Doors: `contract.Contract` and `registry.contract_of`. Never launches and never computes.
"""
