//! Links of the documentation lead somewhere.

use std::path::Path;

/// What a page links to, but for other sites and places on the page itself.
fn links(text: &str) -> impl Iterator<Item = &str> {
    let after = text.split("](").skip(1);
    let targets = after
        .filter_map(|rest| rest.split_once(')'))
        .map(|(to, _)| to);
    let files = targets.map(|to| to.split('#').next().unwrap_or_default());
    files.filter(|to| !to.is_empty() && !to.contains("://"))
}

#[test]
fn every_link_leads_to_a_file() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let pages = std::fs::read_dir(root.join("docs")).unwrap();
    let mut pages: Vec<_> = pages.map(|page| page.unwrap().path()).collect();
    pages.retain(|page| page.extension().is_some_and(|end| end == "md"));
    pages.push(root.join("README.md"));
    let mut count = 0;
    for page in pages {
        let text = std::fs::read_to_string(&page).unwrap();
        for link in links(&text) {
            let to = page.parent().unwrap().join(link);
            assert!(to.exists(), "{} links to {link}", page.display());
            count += 1;
        }
    }
    assert!(count > 20, "{count} links were found");
}

#[test]
fn links_are_found() {
    let text = "[a](b.md), [c](d.md#e) [f](#g) [h](https://i.j)";
    assert_eq!(links(text).collect::<Vec<_>>(), ["b.md", "d.md"]);
}
