// The half types stand in hip_runtime.h.
#include "hip_runtime.h"
