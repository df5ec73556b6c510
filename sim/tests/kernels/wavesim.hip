// Kernels for tests/wavesim.rs: arguments of every kind.

#define __global__ __attribute__((global))

struct Scale {
  const float* x;
  unsigned char flag;
  float factor;
  unsigned short count;
};

extern "C" __global__ void scale(float* y, Scale s) {
  unsigned i = __builtin_amdgcn_workgroup_id_x() * 64 + __builtin_amdgcn_workitem_id_x();
  if (i < s.count) y[i] = s.flag ? s.factor * s.x[i] : -1.0f;
}

extern "C" __global__ void numbers(double* out, char a, unsigned short b, int c, long d, _Float16 e, float f, double g,
                                   const int* p) {
  if (__builtin_amdgcn_workitem_id_x() != 0) return;
  out[0] = a;
  out[1] = b;
  out[2] = c;
  out[3] = d;
  out[4] = e;
  out[5] = f;
  out[6] = g;
  out[7] = p == nullptr;
}
