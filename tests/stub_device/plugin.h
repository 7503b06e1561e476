// Functions that plugin.cc and collectives.cc share.
#pragma once

#include "paddle/phi/backends/device_ext.h"

// Returns the accessible address of an address of a tensor.
char* real(const void* address);

// Protects the pages that faults in Paddle have opened.
void close_pages();

// Fills in the functions that communicate between processes.
void set_collectives(C_DeviceInterface& api);
