// A .cu file may include this; the emulator includes what is in it first.
#pragma once
