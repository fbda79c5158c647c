// CUDA's named constants.
#pragma once
#include <math.h>
#define CUDART_INF_F ((float)INFINITY)
#define CUDART_NAN_F ((float)NAN)
#define CUDART_MIN_DENORM_F 0x1p-149f
#define CUDART_MAX_NORMAL_F 0x1.fffffep127f
#define CUDART_PI_F 3.141592654f
#define CUDART_L2E_F 1.442695041f
#define CUDART_LN2_F 0.693147181f
#define CUDART_SQRT_TWO_F 1.414213562f
#define CUDART_INF ((double)INFINITY)
#define CUDART_PI 3.1415926535897931e+0
