"""What is allowed beside an attack and after it: every number once, with its reason."""

from __future__ import annotations

#: A balancer gives a health check a second or more. A third of that leaves room for its network.
HEALTH_FLOOR_SECONDS = 0.3
#: Where the machine is slow, alone is slow too. Attackers take cores of the server's, which they
#: would not from elsewhere; so a few times as long is no stall.
HEALTH_TIMES = 5.0
#: Of a request of 60 tokens, which takes some 0.03 s alone: twice that is less than two steps with
#: 16 others. Half a second is what a reader of a chat takes for at once.
TTFT_FLOOR_SECONDS = 0.5
#: What another client may notice of sixteen that want all.
TTFT_TIMES = 2.0
#: The slowest probe counts, not a percentile: a balancer gives up after one or two. So many are
#: made at least, so that a stall of a second cannot fall between two.
MIN_PROBES = 20
PROBE_EVERY_SECONDS = 0.1
#: A probe that has no answer by then counts as this long.
PROBE_SECONDS = 10.0

#: Of the server's process beyond the budget of bodies: 60 MiB are there before anybody asks.
MEMORY_BYTES = 128 << 20
#: Of all bodies that are being read, together, as docs/serving.md states it.
BODY_BUDGET_BYTES = 256 << 20
#: Of the server and all its processes. A worker has 320 MiB; the rest is what this machine lends
#: the tests. An attack that gets there is ended.
TREE_BYTES = 4 << 30

#: How long an attack lasts, and how long the server may need to be done with it.
ATTACK_SECONDS = 4.0
SETTLE_SECONDS = 15.0
#: Files and threads may be a few more than before: pools and caches fill when they are first used.
MORE_FILES = 8
MORE_THREADS = 16
#: Lines of the log for one attack, whatever it does, beside the one that each request has: a log on
#: a disk is a resource too.
LOG_LINES = 200

#: Fuzzed requests of all tests together, how many tests they are, and what a single one may take.
FUZZ_REQUESTS = 20_000
FUZZ_PARTS = 10
#: Of a server whose models come and go, each of which takes seconds to load.
FUZZ_REQUESTS_OF_SEVERAL = 2_000
FUZZ_SECONDS = 30.0
