// Everything a program needs. Start reading at weft/collective.h.
#pragma once

#include "weft/collective.h"
#include "weft/config.h"
#include "weft/engine.h"
#include "weft/error.h"
#include "weft/world.h"
