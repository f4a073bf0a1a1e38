"""The fault lab: defects planted in the real engine, and the score of the doctor.

Doors: `run.run_child` runs one victim (`victims/`) or its healthy twin in a process of its own,
`score.score_all` has each bundle diagnosed and counts what was told right.
Never tells the doctor what was planted.
"""
