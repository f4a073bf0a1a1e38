"""How models speak beside their answers: thoughts and calls of tools, and what they are offered.

Doors: `thoughts.make_answer_reader` for an answer in pieces, `tools.check_tools` for a request. It
never looks at a token or renders a template.
"""
