// A stand-in for a HIP runtime that has DEVICES devices.

int hipGetDeviceCount(int *count) {
    *count = DEVICES;
    return DEVICES ? 0 : 100;
}

int hipInit(unsigned flags) { return (int)flags; }
