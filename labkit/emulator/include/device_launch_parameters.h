// Already in the umbrella header.
#pragma once
#include "cuda_emulator.h"
