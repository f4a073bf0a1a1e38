"""What is ordered before what: work in streams, events, waits of the host, and memory they use.

Door: `ledger.Ledger`, which takes what a program asks for, in the order in which it asks.
Never knows torch or a device, and needs no race to happen.
"""
