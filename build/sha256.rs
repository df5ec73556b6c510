// SHA-256 (FIPS 180-4): the build script has no dependencies.

/// The digest of `bytes` in hexadecimal, as `sha256sum` prints it.
pub fn hex(bytes: &[u8]) -> String {
    digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

fn digest(bytes: &[u8]) -> [u8; 32] {
    let (first, k) = constants();
    let mut state = first;
    let mut padded = bytes.to_vec();
    padded.push(0x80);
    padded.resize((padded.len() + 8).next_multiple_of(64) - 8, 0);
    padded.extend((bytes.len() as u64 * 8).to_be_bytes());
    for block in padded.chunks_exact(64) {
        let mut w = [0u32; 64];
        for (word, four) in w.iter_mut().zip(block.chunks_exact(4)) {
            *word = u32::from_be_bytes([four[0], four[1], four[2], four[3]]);
        }
        for i in 16..64 {
            let (x, y) = (w[i - 15], w[i - 2]);
            let s0 = x.rotate_right(7) ^ x.rotate_right(18) ^ (x >> 3);
            let s1 = y.rotate_right(17) ^ y.rotate_right(19) ^ (y >> 10);
            let sum = w[i - 16].wrapping_add(s0).wrapping_add(w[i - 7]);
            w[i] = sum.wrapping_add(s1);
        }
        let [mut a, mut b, mut c, mut d, mut e, mut f, mut g, mut h] = state;
        for i in 0..64 {
            let s1 = e.rotate_right(6) ^ e.rotate_right(11) ^ e.rotate_right(25);
            let choice = (e & f) ^ (!e & g);
            let t1 = h.wrapping_add(s1).wrapping_add(choice);
            let t1 = t1.wrapping_add(k[i]).wrapping_add(w[i]);
            let s0 = a.rotate_right(2) ^ a.rotate_right(13) ^ a.rotate_right(22);
            let majority = (a & b) ^ (a & c) ^ (b & c);
            let t2 = s0.wrapping_add(majority);
            (h, g, f, e) = (g, f, e, d.wrapping_add(t1));
            (d, c, b, a) = (c, b, a, t1.wrapping_add(t2));
        }
        for (total, add) in state.iter_mut().zip([a, b, c, d, e, f, g, h]) {
            *total = total.wrapping_add(add);
        }
    }
    let mut out = [0; 32];
    for (four, word) in out.chunks_exact_mut(4).zip(state) {
        four.copy_from_slice(&word.to_be_bytes());
    }
    out
}

/// The initial state and the round constants: 32 bits of the fractions of the square roots of the first 8 primes, and of the
/// cube roots of the first 64.
fn constants() -> ([u32; 8], [u32; 64]) {
    let mut primes = (2u128..).filter(|n| (2..*n).take_while(|d| d * d <= *n).all(|d| n % d != 0));
    let (mut first, mut k) = ([0; 8], [0; 64]);
    for i in 0..64 {
        let prime = primes.next().expect("there is no last prime");
        k[i] = root(prime << 96, 3) as u32;
        if i < 8 {
            first[i] = root(prime << 64, 2) as u32;
        }
    }
    (first, k)
}

/// The largest whole number whose `power`, 2 or 3, is at most `n`.
fn root(n: u128, power: u32) -> u128 {
    let (mut low, mut high) = (0u128, 1u128 << 42);
    while low + 1 < high {
        let middle = low.midpoint(high);
        if middle.pow(power) <= n {
            low = middle;
        } else {
            high = middle;
        }
    }
    low
}
