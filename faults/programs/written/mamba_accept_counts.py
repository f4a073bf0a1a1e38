"""After verification: move the accepted Mamba states of every request to their slot."""
import torch
import triton
import triton.language as tl

DEV = "cuda" if torch.cuda.is_available() else "cpu"

@triton.jit
def move_states(state_ptr, out_ptr, accepted_ptr, n_states, drafts, D: tl.constexpr):
    req = tl.program_id(0)
    st = tl.program_id(1)
    d = tl.arange(0, D)
    n = tl.load(accepted_ptr + req)
    src = state_ptr + ((req * n_states + st) * drafts + n - 1) * D
    tl.store(out_ptr + (req * n_states + st) * D + d, tl.load(src + d))
    if st == 0:
        # the states are in place: the next step starts from one token
        tl.store(accepted_ptr + req, 1)


def commit(states, accepted):
    reqs, n_states, drafts, D = states.shape
    out = torch.empty(reqs, n_states, D, device=states.device)
    move_states[(reqs, n_states)](states, out, accepted, n_states, drafts, D=D)
    return out


torch.manual_seed(0)
reqs, n_states, drafts, D = 3, 4, 5, 16
states = torch.randn(reqs, n_states, drafts, D, device=DEV)
accepted = torch.tensor([3, 1, 5], dtype=torch.int32, device=DEV)
want = torch.stack([states[r, :, n - 1] for r, n in enumerate(accepted.tolist())])
out = commit(states, accepted)
print("states that differ per request:", (out != want).any(2).sum(1).tolist())
assert accepted.tolist() == [1, 1, 1]
assert torch.equal(out, want)
print("ok")

# /// truth
# title = "one program of a request resets the count that its siblings still read"
# why = "The program of state 0 resets accepted[req] in place while the programs of the other states of the request read it, in no defined order."
# class = "race between programs"
# sources = ["https://github.com/vllm-project/vllm-ascend/pull/13013"]
# symptom = "prints the states that differ ([3, 0, 3]), AssertionError"
# causes = ["race between programs"]
# kernels = ["move_states"]
# arguments = ["accepted_ptr"]
# lines = [
#   "n = tl.load(accepted_ptr + req)",
#   "if st == 0:",
#   "tl.store(accepted_ptr + req, 1)",
#   "move_states[(reqs, n_states)](states, out, accepted, n_states, drafts, D=D)",
# ]
# fix = 'launch|program|copy|atomic'
# never = 'larger'
# options = ["--suspect"]
# fix_old = "    if st == 0:\n        # the states are in place: the next step starts from one token\n        tl.store(accepted_ptr + req, 1)\n\n\ndef commit(states, accepted):\n    reqs, n_states, drafts, D = states.shape\n    out = torch.empty(reqs, n_states, D, device=states.device)\n    move_states[(reqs, n_states)](states, out, accepted, n_states, drafts, D=D)\n"
# fix_new = "\n\ndef commit(states, accepted):\n    reqs, n_states, drafts, D = states.shape\n    out = torch.empty(reqs, n_states, D, device=states.device)\n    move_states[(reqs, n_states)](states, out, accepted, n_states, drafts, D=D)\n    # the states are in place: the next step starts from one token\n    accepted.fill_(1)\n"
# ///
