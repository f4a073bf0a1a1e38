/* A driver and a CUPTI without a GPU, in one library: calls run the callbacks, and launch nothing. */
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <stdlib.h>
typedef void (*cb_t)(void*, int, uint32_t, const void*);
static cb_t cb; static void *user; static unsigned char on[1024]; static int refusal;
struct data { int site; int p0; const char *name; const void *params; void *ret; const char *sym; void *ctx; uint32_t uid; uint32_t p1; uint64_t *corr; uint32_t cid; uint32_t p2; };
int cuptiSubscribe(void **h, cb_t c, void *u) { if (refusal) return refusal; cb = c; user = u; *h = (void*)1; return 0; }
int cuptiUnsubscribe(void *h) { cb = 0; return 0; }
int cuptiEnableCallback(uint32_t e, void *h, int d, uint32_t id) { if (id < 1024) on[id] = e; return 0; }
/* What a launch runs into; whether the GPU answers no more; whether it loads what it launches. */
static int failure, has_failed, dies, is_lazy;
static int around(uint32_t id, const char *name, void *params, const char *sym, int result) {
  struct data d; uint64_t corr = 0; memset(&d, 0, sizeof d);
  d.name = name; d.params = params; d.sym = sym; d.ret = &result; d.corr = &corr;
  if (cb && on[id]) cb(user, 1, id, &d);
  if (sym) is_lazy = 0;
  if (sym && failure && !result) result = has_failed = failure;
  if (sym && dies) return result;
  d.site = 1;
  if (cb && on[id]) cb(user, 1, id, &d);
  return result;
}
struct fn { const char *sym; int n; size_t off[8]; size_t size[8]; int max_threads; };
static struct fn fns[] = {
  {"scatter", 3, {0, 8, 16}, {8, 8, 4}, 1024},
  {"_Z5scalePfi", 2, {0, 8}, {8, 4}, 1024},
};
void *fake_function(int i) { return &fns[i]; }
int cuFuncGetParamInfo(struct fn *f, size_t i, size_t *o, size_t *s) { if (has_failed || is_lazy) return 1; if (i >= (size_t)f->n) return 1; *o = f->off[i]; *s = f->size[i]; return 0; }
int cuKernelGetParamInfo(struct fn *f, size_t i, size_t *o, size_t *s) { return 400; }
int cuCtxGetDevice(int *d) { *d = 0; return 0; }
int cuDeviceGetAttribute(int *v, int a, int d) { static int t[] = {0,1024,1024,1024,64,2147483647,65535,65535}; *v = a < 8 ? t[a] : 232448; return 0; }
int cuFuncGetAttribute(int *v, int a, struct fn *f) { *v = a == 0 ? f->max_threads : 0; return 0; }
int cuGetErrorName(int c, const char **s) { *s = c == 1 ? "CUDA_ERROR_INVALID_VALUE" : "CUDA_ERROR_ILLEGAL_ADDRESS"; return 0; }
int cuGetErrorString(int c, const char **s) { *s = c == 1 ? "invalid argument" : "an illegal memory access was encountered"; return 0; }
struct lp { void *f; uint32_t g[3], b[3], sh; void *st; void **kp; void **ex; };
int cuLaunchKernel(struct fn *f, uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t e, uint32_t g, uint32_t sh, void *st, void **kp, void **ex) {
  struct lp p = {f, {a,b,c}, {d,e,g}, sh, st, kp, ex};
  return around(307, "cuLaunchKernel", &p, f->sym, d*e*g > 1024 ? 1 : 0);
}
struct cfg { uint32_t g[3], b[3], sh; void *st; void *at; uint32_t n; };
int cuLaunchKernelEx(struct cfg *c, struct fn *f, void **kp, void **ex) {
  struct { void *c, *f; void **kp; void **ex; } p = {c, f, kp, ex};
  return around(652, "cuLaunchKernelEx", &p, f->sym, c->b[0] > 1024 ? 1 : 0);
}
static uint64_t next = 0x7f0000000000ull;
int cuMemAlloc_v2(uint64_t *out, size_t n) { struct { uint64_t *p; size_t n; } p = {out, n}; *out = next; next += (n + 0x1fffff) & ~0x1fffffull; return around(243, "cuMemAlloc_v2", &p, 0, 0); }
int cuMemFree_v2(uint64_t a) { uint64_t p = a; return around(245, "cuMemFree_v2", &p, 0, 0); }
int cuGraphLaunch(void *g, void *s) { struct { void *g, *s; } p = {g, s}; return around(514, "cuGraphLaunch", &p, 0, 0); }
int cuModuleUnload(void *m) { void *p = m; return around(22, "cuModuleUnload", &p, 0, 0); }
void fake_fail(int code, int is_end) { failure = code; has_failed = 0; dies = is_end; }
void fake_load_late(void) { is_lazy = 1; }
void fake_refuse(int code) { refusal = code; }
static int times;
static void *run(void *f) {
  uint64_t a = 1; int n = 2; void *kp[] = {&a, &a, &n};
  for (int i = 0; i < times; i++) cuLaunchKernel(f, 1, 1, 1, 32, 1, 1, 0, 0, kp, 0);
  return 0;
}
int fake_thread(void *f, int number) {
  pthread_t t; times = number;
  return pthread_create(&t, 0, run, f) || pthread_join(t, 0);
}
