// One source for two machines: functions of three 64-bit words, compiled for gfx942 as a kernel and for the host as a
// program. Both must give the same bits.

#ifdef __HIP__
#define DEVICE __attribute__((device))
#else
#define DEVICE
#include <stdio.h>
#include <stdlib.h>
#endif

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char i8;
typedef short i16;
typedef int i32;
typedef long long i64;
typedef __int128 i128;
typedef unsigned __int128 u128;
typedef _Float16 f16;
typedef f16 h2 __attribute__((ext_vector_type(2)));
typedef float f2 __attribute__((ext_vector_type(2)));
typedef short s2 __attribute__((ext_vector_type(2)));
typedef unsigned short us2 __attribute__((ext_vector_type(2)));

template <typename T, typename U>
DEVICE static inline T bits(U u) {
    static_assert(sizeof(T) == sizeof(U), "as many bits");
    T t;
    __builtin_memcpy(&t, &u, sizeof t);
    return t;
}
DEVICE static inline double d(u64 x) { return bits<double>(x); }
DEVICE static inline float f(u64 x) { return bits<float>((u32)x); }
DEVICE static inline f16 h(u64 x) { return bits<f16>((u16)x); }
// Which NaN a machine makes is its own affair.
DEVICE static inline u64 out(double x) { return x != x ? 0x7ff8000000000000 : bits<u64>(x); }
DEVICE static inline u64 out(float x) { return x != x ? 0x7fc00000 : bits<u32>(x); }
DEVICE static inline u64 out(f16 x) { return x != x ? 0x7e00 : bits<u16>(x); }
DEVICE static inline u64 pair(u32 low, u32 high) { return (u64)high << 32 | low; }

// Integers.
#define INTEGER(T, U, WIDE, tag)                                                                          \
    DEVICE static u64 ring_##tag(u64 a, u64 b, u64 c) { return (U)((U)a * (U)b + (U)c - ((U)b & ~(U)a)); } \
    DEVICE static u64 high_##tag(u64 a, u64 b, u64) { return (U)((WIDE)(T)a * (T)b >> (8 * sizeof(T))); }   \
    DEVICE static u64 quotient_##tag(u64 a, u64 b, u64 c) {                                               \
        U x = (U)a, y = (U)(b >> (c & (8 * sizeof(T) - 1)));                                              \
        return y ? (U)(x / y) ^ (U)(x % y) << 1 : x;                                                      \
    }                                                                                                     \
    DEVICE static u64 signed_quotient_##tag(u64 a, u64 b, u64 c) {                                        \
        T x = (T)a, y = (T)((T)b >> (c & (8 * sizeof(T) - 1)));                                           \
        return y && y != -1 ? (U)(x / y) ^ (U)(x % y) << 1 : x;                                           \
    }                                                                                                     \
    DEVICE static u64 shifts_##tag(u64 a, u64 b, u64) {                                                   \
        u32 n = b & (8 * sizeof(T) - 1), m = -n & (8 * sizeof(T) - 1);                                    \
        return (U)((U)((U)a << n | (U)a >> m) ^ (U)((T)a >> n));                                          \
    }                                                                                                     \
    DEVICE static u64 order_##tag(u64 a, u64 b, u64 c) {                                                  \
        T x = (T)a, y = (T)b, z = (T)c;                                                                   \
        U p = (U)a, q = (U)b;                                                                             \
        T median = x < y ? (y < z ? y : x < z ? z : x) : (x < z ? x : y < z ? z : y);                     \
        return (U)((U)median + (p < q ? p : q) * 3 + (U)(x > z) + 2 * (U)(p >= q));                       \
    }                                                                                                     \
    DEVICE static u64 overflow_##tag(u64 a, u64 b, u64 c) {                                               \
        T s, t, p;                                                                                        \
        U v, w;                                                                                           \
        u64 o = __builtin_add_overflow((T)a, (T)b, &s) | __builtin_sub_overflow((T)a, (T)c, &t) << 1;     \
        o |= __builtin_mul_overflow((T)b, (T)c, &p) << 2 | __builtin_add_overflow((U)a, (U)b, &v) << 3;   \
        o |= __builtin_sub_overflow((U)b, (U)c, &w) << 4;                                                 \
        return o + ((u64)(U)(s ^ t ^ p) << 5) + (u64)(U)(v + w);                                          \
    }
INTEGER(i8, u8, i32, i8)
INTEGER(i16, u16, i32, i16)
INTEGER(i32, u32, i64, i32)
INTEGER(i64, u64, i128, i64)

DEVICE static u64 counts(u64 a, u64 b, u64 c) {
    u32 n = __builtin_popcountll(a) + (a ? __builtin_clzll(a) : 64) * 3 + (b ? __builtin_ctzll(b) : 64) * 5;
    n += __builtin_popcount((u32)c) * 7 + ((u32)c ? __builtin_clz((u32)c) + __builtin_ctz((u32)c) : 64) * 11;
    return n ^ __builtin_bswap64(a) ^ __builtin_bitreverse64(b) ^ __builtin_bitreverse32((u32)c) ^
           __builtin_bswap32((u32)c);
}
DEVICE static u64 saturated(u64 a, u64 b, u64) {
    us2 x = bits<us2>((u32)a), y = bits<us2>((u32)b);
    s2 z = bits<s2>((u32)(a >> 32)), w = bits<s2>((u32)(b >> 32));
    us2 low = __builtin_elementwise_sub_sat(__builtin_elementwise_add_sat(x, y), us2{77, 999});
    return pair(bits<u32>(low), bits<u32>(__builtin_elementwise_sub_sat(z, w)));
}
DEVICE static u64 packed_i16(u64 a, u64 b, u64 c) {
    s2 x = bits<s2>((u32)a), y = bits<s2>((u32)b), z = bits<s2>((u32)c);
    us2 p = bits<us2>((u32)(a >> 32)), q = bits<us2>((u32)(b >> 32));
    s2 low = __builtin_elementwise_max(x * y + z, y - x) + (z << (s2){3, 5});
    us2 high = __builtin_elementwise_min(p * q, q - p) + (p >> (us2){7, 2});
    return pair(bits<u32>(low), bits<u32>(high) ^ bits<u32>(x >> (s2){2, 9}));
}
DEVICE static u64 bytes(u64 a, u64 b, u64 c) {
    u64 sum = 0;
    for (int i = 0; i < 8; ++i) {
        u8 x = a >> 8 * i, y = b >> 8 * (7 - i);
        i8 z = c >> 8 * i;
        sum += (u64)(u8)(x * y + z) << 8 * i ^ (u64)(x > y) << i ^ (u64)(z < (i8)x ? z : 1) * 257;
    }
    return sum;
}
DEVICE static u64 wide(u64 a, u64 b, u64 c) {
    u128 p = (u128)a * b + c;
    p = p * (b | 1) - ((u128)c << 64);
    return (u64)(p >> 64) ^ (u64)p ^ (u64)(p >> (c & 127)) ^ (p > ((u128)a << 64));
}

// Floating point.
#define FLOAT(T, get, tag)                                                                                           \
    DEVICE static u64 sum_##tag(u64 a, u64 b, u64 c) { return out((T)((T)(get(a) + get(b)) - get(c))); }             \
    DEVICE static u64 product_##tag(u64 a, u64 b, u64 c) { return out((T)((T)(get(a) * get(b)) + get(c))); }         \
    DEVICE static u64 ratio_##tag(u64 a, u64 b, u64) { return out((T)(get(a) / get(b))); }                           \
    DEVICE static u64 compare_##tag(u64 a, u64 b, u64 c) {                                                           \
        T x = get(a), y = get(b), z = get(c);                                                                        \
        u64 o = (x < y) | (x <= y) << 1 | (x == z) << 2 | (x != y) << 3 | (y > z) << 4 | (y >= z) << 5;              \
        o |= __builtin_isunordered(x, z) << 6 | __builtin_islessgreater(x, y) << 7 | !(x < z) << 8 | !(y >= x) << 9; \
        T pick = x < y ? z : -x;                                                                                     \
        return out(pick) ^ o << 20;                                                                                  \
    }
FLOAT(double, d, f64)
FLOAT(float, f, f32)
FLOAT(f16, h, f16)

DEVICE static u64 root_f64(u64 a, u64 b, u64 c) {
    return out(__builtin_sqrt(d(a & ~(1ull << 63)))) ^ out(__builtin_fma(d(a), d(b), d(c)));
}
DEVICE static u64 root_f32(u64 a, u64 b, u64 c) {
    return out(__builtin_sqrtf(f(a & 0x7fffffff))) ^ out(__builtin_fmaf(f(a), f(b), f(c))) << 32;
}
DEVICE static u64 rounded_f64(u64 a, u64 b, u64) {
    double x = d(a), y = d((b & 0x800fffffffffffff) | (1010 + (b >> 52) % 50) << 52);
    return out(__builtin_floor(x)) + out(__builtin_ceil(y)) * 3 + out(__builtin_trunc(y)) * 5 +
           out(__builtin_rint(y)) * 7 + out(__builtin_copysign(y, x)) * 11;
}
DEVICE static u64 rounded_f32(u64 a, u64 b, u64) {
    float x = f(a), y = f((b & 0x807fffff) | (120 + (b >> 32) % 32) << 23);
    return out(__builtin_floorf(x)) + out(__builtin_ceilf(y)) * 3 + out(__builtin_truncf(y)) * 5 +
           out(__builtin_rintf(y)) * 7 + out(__builtin_copysignf(y, x)) * 11 + (out(__builtin_fabsf(x)) << 32);
}
DEVICE static u64 conversions(u64 a, u64 b, u64 c) {
    u64 o = out((double)(i64)a) + out((double)b) * 3 + out((float)(i64)b) * 5 + out((float)a) * 7;
    o += out((double)(i32)c) * 11 + out((float)(i32)c) * 13 + out((float)(u32)c) * 17 + out((f16)(float)(i16)c) * 19;
    double x = d((a & 0x800fffffffffffff) | (1000 + (a >> 52) % 53) << 52);
    float y = f((b & 0x807fffff) | (110 + (b >> 40) % 47) << 23);
    o ^= (u64)(i64)x + (u64)(i32)y * 3 + (u64)(i64)y * 5 + (u64)__builtin_fabs(x) * 7 + (u32)__builtin_fabsf(y) * 9;
    return o ^ out((float)d(c)) ^ out((double)f(c)) << 1 ^ out((f16)f(b)) << 2 ^ out((float)h(c)) << 3;
}
DEVICE static u64 packed_f16(u64 a, u64 b, u64 c) {
    h2 x = bits<h2>((u32)a), y = bits<h2>((u32)b), z = bits<h2>((u32)c);
    h2 r = x * y;
    r = r + z;
    r = r - x.yx;
    f16 low = r.x, high = r.y;
    return out(low) | out(high) << 16;
}
DEVICE static u64 packed_f32(u64 a, u64 b, u64 c) {
    f2 x = bits<f2>(a), y = bits<f2>(b), z = bits<f2>(c);
    f2 r = x * y;
    r = r + z.yx;
    f2 s = __builtin_elementwise_fma(r, y, x);
    float low = s.x, high = s.y;
    return out(low) | out(high) << 32;
}

// Control flow, calls, memory of a lane.
DEVICE static u64 divisor(u64 a, u64 b, u64) {
    u64 x = a | 1, y = b >> 20 | 1;
    while (y) {
        u64 r = x % y;
        x = y, y = r;
    }
    return x;
}
DEVICE static u64 collatz(u64 a, u64 b, u64 c) {
    u64 n = a % 5000 + 1, steps = 0, limit = c % 200;
    while (n != 1 && steps < limit) {
        n = n & 1 ? 3 * n + 1 : n / 2;
        if (n % 11 == b % 11) break;
        ++steps;
    }
    return steps << 32 ^ n;
}
DEVICE static u64 choices(u64 a, u64 b, u64 c) {
    u64 r = a;
    for (int i = 0; i < 12; ++i) {
        switch (r % 9) {
            case 0: r += b; break;
            case 1: r ^= c << 1; break;
            case 2: r = r * 5 + 1;  // and on
            case 3: r -= b >> 3; break;
            case 4: if (b & 1 << i) continue; r ^= 0x5555; break;
            case 5: r = ~r; break;
            case 6: r = r << 7 | r >> 57; break;
            case 7: if (r > c) return r ^ i; r += 2; break;
            default: r += i;
        }
    }
    return r;
}
__attribute__((noinline)) DEVICE static u64 depth(u64 n, u64 a) { return n == 0 ? a : depth(n - 1, a * 31 + n) ^ (a >> 3); }
DEVICE static u64 recursion(u64 a, u64 b, u64) { return depth(b % 12, a); }
__attribute__((noinline)) DEVICE static u64 first(u64 a, u64 b) { return a * b; }
__attribute__((noinline)) DEVICE static u64 second(u64 a, u64 b) { return a - (b << 5); }
__attribute__((noinline)) DEVICE static u64 third(u64 a, u64 b) { return a ^ __builtin_bswap64(b); }
DEVICE static u64 indirect(u64 a, u64 b, u64 c) {
    typedef u64 (*function)(u64, u64);
    const function table[3] = {first, second, third};
    for (int i = 0; i < 4; ++i) a = table[(a + c) % 3](a, b + i);
    return a;
}
DEVICE static u64 sorted(u64 a, u64 b, u64 c) {
    u16 v[12];
    for (int i = 0; i < 4; ++i) v[i] = a >> 16 * i, v[4 + i] = b >> 16 * i, v[8 + i] = c >> 16 * i;
    for (int i = 1; i < 12; ++i)
        for (int j = i; j > 0 && v[j - 1] > v[j]; --j) {
            u16 t = v[j];
            v[j] = v[j - 1], v[j - 1] = t;
        }
    u64 o = 0;
    for (int i = 0; i < 12; ++i) o = o * 65599 + v[(i + c) % 12];
    return o;
}
DEVICE static u64 unaligned(u64 a, u64 b, u64 c) {
    u8 m[32];
    __builtin_memcpy(m + 1, &a, 8);
    __builtin_memcpy(m + 9, &b, 8);
    __builtin_memcpy(m + 17, &c, 8);
    __builtin_memmove(m + 3, m + 1, 15);
    m[0] = c, m[25] = a;
    u64 x;
    u32 y;
    u16 z;
    __builtin_memcpy(&x, m + 1 + c % 13, 8);
    __builtin_memcpy(&y, m + 1 + a % 19, 4);
    __builtin_memcpy(&z, m + 1 + b % 22, 2);
    return x ^ (u64)y << 13 ^ z;
}
DEVICE static u64 checksum(u64 a, u64 b, u64 c) {
    u32 crc = ~0u;
    u64 words[3] = {a, b, c};
    for (int i = 0; i < 24; ++i) {
        crc ^= (u8)(words[i / 8] >> 8 * (i % 8));
        for (int j = 0; j < 8; ++j) crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0);
    }
    return crc;
}
DEVICE static u64 elimination(u64 a, u64 b, u64 c) {
    double m[4][4];
    for (int i = 0; i < 16; ++i) {
        u64 w = (a >> i) * 0x9e3779b97f4a7c15 + (b << i % 7) + c;
        m[i / 4][i % 4] = (double)(i32)(w >> 33) / 65536.0 + (i % 5 == 0 ? 40000.0 : 0.0);
    }
    double det = 1;
    for (int k = 0; k < 4; ++k) {
        int p = k;
        for (int i = k + 1; i < 4; ++i)
            if (__builtin_fabs(m[i][k]) > __builtin_fabs(m[p][k])) p = i;
        for (int j = 0; j < 4; ++j) {
            double t = m[k][j];
            m[k][j] = m[p][j], m[p][j] = t;
        }
        det *= p == k ? m[k][k] : -m[k][k];
        for (int i = k + 1; i < 4; ++i) {
            double q = m[i][k] / m[k][k];
            for (int j = k; j < 4; ++j) m[i][j] -= q * m[k][j];
        }
    }
    return out(det);
}

#define INTEGERS(X, tag) \
    X(ring_##tag) X(high_##tag) X(quotient_##tag) X(signed_quotient_##tag) X(shifts_##tag) X(order_##tag) X(overflow_##tag)
#define FLOATS(X, tag) X(sum_##tag) X(product_##tag) X(ratio_##tag) X(compare_##tag)
#define FUNCTIONS(X)                                                                                          \
    INTEGERS(X, i8) INTEGERS(X, i16) INTEGERS(X, i32) INTEGERS(X, i64) X(counts) X(saturated) X(packed_i16)   \
    X(bytes) X(wide) FLOATS(X, f64) FLOATS(X, f32) FLOATS(X, f16) X(root_f64) X(root_f32) X(rounded_f64)      \
    X(rounded_f32) X(conversions) X(packed_f16) X(packed_f32) X(divisor) X(collatz) X(choices) X(recursion)   \
    X(indirect) X(sorted) X(unaligned) X(checksum) X(elimination)

#ifdef __HIP__
#define KERNEL(name)                                                                               \
    extern "C" __attribute__((global)) void test_##name(u64* out, const u64* in, u32 n) {          \
        u32 i = __builtin_amdgcn_workgroup_id_x() * 256 + __builtin_amdgcn_workitem_id_x();        \
        if (i < n) out[i] = name(in[3 * i], in[3 * i + 1], in[3 * i + 2]);                         \
    }
FUNCTIONS(KERNEL)
#else
// Reads triples of words; writes the name of each function and its results.
int main() {
    enum { MOST = 1 << 20 };
    static u64 in[3 * MOST], results[MOST];
    size_t n = fread(in, 24, MOST, stdin);
#define RUN(name)                                                                                   \
    for (size_t i = 0; i < n; ++i) results[i] = name(in[3 * i], in[3 * i + 1], in[3 * i + 2]);      \
    printf("test_%s\n", #name);                                                                     \
    fwrite(results, 8, n, stdout);
    FUNCTIONS(RUN)
    return 0;
}
#endif
