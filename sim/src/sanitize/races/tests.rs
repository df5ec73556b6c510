use super::dwords::{DWORDS, Dwords, PAGE};
use super::shadow::{Shadow, Tag, Touch};

/// Pseudo-random numbers below `n`.
fn random() -> impl FnMut(u64) -> u64 {
    let mut state = 1u64;
    move |n| {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (state >> 33) % n
    }
}

#[test]
fn sets_of_dwords() {
    for (first, last) in [(0, 0), (0, 255), (60, 70), (63, 64), (3, 200), (255, 255)] {
        let mut set = Dwords::default();
        set.insert(first, last);
        assert!(set.iter().eq(first..=last));
        assert_eq!(set.first(), Some(first));
        assert!((0..DWORDS).all(|d| set.contains(d) == (first..=last).contains(&d)));
    }
    assert!(Dwords::default().is_empty());
}

/// A wave's last access to a dword must not depend on the number of accesses that the list has kept.
#[test]
fn a_list_that_is_made_shorter_says_the_same() {
    let mut random = random();
    let mut shadow = Shadow::default();
    let mut all: Vec<Touch> = Vec::new();
    for time in 1..=3000u32 {
        let coherent = if random(3) == 0 { Tag::COHERENT } else { 0 };
        let touch = Touch {
            dwords: Dwords::default(),
            time,
            tag: Tag(time & 0xffff | coherent),
            epoch: 1 + time / 100,
            wave: random(3) as u8,
            write: random(2) == 0,
        };
        let start = random(PAGE - 64);
        let end = start + 1 + random(64);
        shadow.begin();
        shadow.add(&touch, start, end, false);
        let page = shadow.page(0);
        all.extend(&page.touches[page.since..]);
    }
    let page = shadow.page(0);
    assert!(page.touches.len() < all.len());
    for wave in 0..3 {
        for write in [false, true] {
            let kept = page.marks(write, wave);
            for (dword, kept) in kept.into_iter().enumerate() {
                let of_wave = all.iter().filter(|t| t.is_by(wave, write));
                let touches = of_wave.filter(|t| t.dwords.contains(dword));
                let expected = touches.fold(Default::default(), |mark, t| t.mark(mark));
                assert_eq!(kept, expected, "wave {wave}, write {write}, dword {dword}");
            }
        }
    }
}
