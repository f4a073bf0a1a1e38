"""Requests become tokens: schedule, run, sample, settle.

Door: `llm.LLM`, and beneath it `engine.Engine.step`.
Never knows a command line or HTTP, and never why something broke: errors go up.
"""
